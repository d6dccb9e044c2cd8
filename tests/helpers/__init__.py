"""What tests share: rank processes and simulated ranks."""
