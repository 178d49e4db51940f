"""``fedsilo survey``: what data the sites hold before anything is trained, as JSON and as a page.

Stands on report, deploy and run.
"""
