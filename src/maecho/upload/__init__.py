"""What travels: an Upload from each client, a Merged model back. File format, checks, size, inspection."""
