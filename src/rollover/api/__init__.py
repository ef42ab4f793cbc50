"""The Python API: what `import rollover` offers (docs/python.md). It stands on what the command line calls."""
