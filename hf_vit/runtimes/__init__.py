"""What runs an exported model without torch; it imports nothing else of this package."""
