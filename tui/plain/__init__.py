"""The chat as plain lines, for a screen reader, a braille line or an Emacs shell."""
