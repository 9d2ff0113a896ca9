"""The server's web page in a real Chromium, which one worker starts once: a package's fixtures end with its last test.

test_page.py         every mode and every control
test_page_images.py  images in the chat
test_page_visits.py  the greeting, runs of earlier, links, Markdown, and how each tab looks and reads at every width
"""
