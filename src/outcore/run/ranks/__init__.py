"""The processes of a run: launching them, how they find each other, what happens when one fails."""
