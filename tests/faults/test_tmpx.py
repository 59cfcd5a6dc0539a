import pytest
@pytest.mark.fault("disk full","ground")
def test_never(hit): pass
@pytest.mark.fault("disk full","ground")
def test_fails(hit): assert 0
@pytest.mark.fault("disk full","ground","tally")
def test_half(hit): hit("ground")
