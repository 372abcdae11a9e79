"""Brings the neurons of several networks into one order."""
