"""The command line: it parses arguments, calls the library and writes the result."""
