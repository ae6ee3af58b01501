"""The fuzz gate: inputs that are mutated at random, and what must never happen with any; see CONTRIBUTING.md."""
