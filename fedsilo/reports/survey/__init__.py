"""``fedsilo survey``: the data that the sites hold, before training, as JSON and as a page.

It imports report, pictures, deploy and run. ``collect`` asks the sites, by
``strategies.meeting.survey``; they answer in ``client_app.summary``.
"""
