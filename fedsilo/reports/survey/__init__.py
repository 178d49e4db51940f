"""``fedsilo survey``: describes the sites' data before training, as JSON and as a page.

``server_app.run.survey`` asks the sites; they answer in ``client_app.summary``.
"""
