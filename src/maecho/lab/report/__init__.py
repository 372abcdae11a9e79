"""What is made from results: tables, pictures and the generated parts of the documents."""
