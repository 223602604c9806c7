"""What tests need to stand on: a real server and a clock that is moved by hand; no test lives here."""
