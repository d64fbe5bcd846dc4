"""Commands of operators: up, down, elect, adopt."""
