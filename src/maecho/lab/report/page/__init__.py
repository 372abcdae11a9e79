"""Makes one HTML file of results: tables, pictures and runs, without anything to fetch."""
