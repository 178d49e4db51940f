"""Parts that all pages share: a template, numbers as text, and small pictures."""
