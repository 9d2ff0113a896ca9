"""The values of `format` in a JSON schema that are enforced, as regular expressions. All others are annotations."""


def _build_date_regex() -> str:
    """All dates of the Gregorian calendar from 0001-01-01 to 9999-12-31."""
    year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
    multiple_of_4 = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, without 00
    leap_year = f"(?:[0-9]{{2}}{multiple_of_4}|{multiple_of_4}00)"
    days_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
    days_30 = "(?:0[1-9]|[12][0-9]|30)"
    days_31 = "(?:0[1-9]|[12][0-9]|3[01])"
    month_and_day = f"(?:02-{days_28}|(?:0[469]|11)-{days_30}|(?:0[13578]|1[02])-{days_31})"
    return f"(?:{year}-{month_and_day}|{leap_year}-02-29)"


DATE = _build_date_regex()
OFFSET = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{OFFSET}"
IPV4_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[Tt]{TIME}",
    "duration": f"P(?:{DURATION_DATE}(?:{DURATION_TIME})?|{DURATION_TIME}|[0-9]+W)",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{IPV4_BYTE}\.){{3}}{IPV4_BYTE}",
    "hostname": rf"{LABEL}(?:\.{LABEL})*",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:{LABEL}\.)+[A-Za-z]{{2,24}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
}
