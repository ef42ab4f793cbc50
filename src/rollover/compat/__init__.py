"""Other libraries' classes over our Python API: a script runs after a change of its import."""
