"""Makes tables, pictures and the generated parts of the documents from results."""
