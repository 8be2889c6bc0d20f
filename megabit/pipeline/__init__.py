"""The pipeline: a schedule is data (``actions``), made (``schedules``), proved (``validate``) and
run (``execute``). Which stage has which layers is ``layout``."""
