"""How pools of labelled images become silos."""
