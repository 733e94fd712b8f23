"""From files of chats to batches of tokens; knows nothing of models, losses or drafts."""
