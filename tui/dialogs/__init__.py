"""The dialogs of the chat. Each returns a typed value; None: cancelled."""
