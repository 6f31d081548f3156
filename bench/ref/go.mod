module ref

go 1.22
