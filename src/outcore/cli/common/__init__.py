"""What the commands have in common: options, messages, wording, who is to blame for an error."""
