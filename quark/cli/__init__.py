"""The command line: one file for each verb. Importing it loads neither torch nor transformers."""
