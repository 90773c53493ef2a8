"""Files that people write: YAML with line numbers, and what is said about mistakes in them."""
