"""What tests share: worker processes without Ray, fake workers, clocks."""
