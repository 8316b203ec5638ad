"""`headrace doctor`: looks at this machine and at what runs, judges it, and says what to do. It changes nothing."""
