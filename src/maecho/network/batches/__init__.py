"""What a batch may be: where its inputs and its labels are, and which labels are classes."""
