"""On which axis the neurons of a value lie after an operation: rules from the shapes of a real run. Knows no layer."""
