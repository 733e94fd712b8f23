"""The drafts: who guesses the next tokens; each in a file of its own behind one interface."""
