"""How `plait verify` judges: false alarms and misses by precision, and what it costs."""
