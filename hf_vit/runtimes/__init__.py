"""What runs an exported model without torch. Deployment folders have copies of it, and of what it imports."""
