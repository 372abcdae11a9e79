"""Draws charts as SVG, by hand: no library is needed, and a page may style and question every mark."""
