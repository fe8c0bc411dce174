"""Instants at which the offsets of time zones change, to the minute, in UTC."""

CHANGES = {
    "Europe/Warsaw": ["2024-03-31T01:00", "2024-10-27T01:00", "2031-03-30T01:00"],
    "America/New_York": ["2024-03-10T07:00", "2024-11-03T06:00"],
    "Australia/Lord_Howe": ["2024-04-06T15:00", "2024-10-05T15:30"],
    "Africa/Casablanca": ["2024-03-10T02:00", "2024-04-14T02:00"],
    "Pacific/Apia": ["2011-12-30T10:00", "2011-04-02T14:00"],
    "America/Sao_Paulo": ["2018-11-04T03:00", "2018-02-18T02:00"],
    "Asia/Tehran": ["2022-03-21T20:30", "2022-09-21T19:30"],
    "Africa/Cairo": ["2024-04-25T22:00", "2024-10-31T21:00"],
    "Antarctica/Troll": ["2024-03-31T01:00", "2024-10-27T01:00"],
    "Asia/Kathmandu": ["2024-03-31T01:00"],
    "UTC": ["2024-03-31T01:00"],
}
