"""One file for each piece of software that numbers are compared with."""
