"""Other libraries' classes by their own names, over the public Python API: a script runs with its import changed."""
