"""What users of other lock libraries run into, one test per trouble, on real servers and in both colours.

colours.py     threads and asyncio behind one blocking face
watching.py    what can be seen on the server, and how to match requests on the way there
programs.py    small programs that run in processes of their own, to be stopped and killed
"""
