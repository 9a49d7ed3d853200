"""The conversation on the screen: messages as rows of lines."""
