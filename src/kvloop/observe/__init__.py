"""What operators see: metrics and receipts."""
