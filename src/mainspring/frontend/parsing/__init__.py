"""What an answer says: text, reasoning and calls of tools, and what calls may say."""
