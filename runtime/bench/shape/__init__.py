"""`kconvert bench decode --shape`: one rank of a model of true size, its weights made up."""
