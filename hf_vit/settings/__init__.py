"""Settings of training and evaluation: fields, recipes, the reader of all values, and options of the command line."""
