"""The seven unknown patients of lab 10, one script each; their names say nothing."""
