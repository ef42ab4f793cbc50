"""What a run directory says, live, ended or killed: the one layer by which commands and `import rollover` read it."""
