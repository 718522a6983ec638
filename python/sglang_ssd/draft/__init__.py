"""The draft process: it holds the draft model, forks paths for likely outcomes and answers with proposals."""
