"""What tests share beside fixtures."""
