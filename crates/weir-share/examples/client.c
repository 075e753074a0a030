/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Writes a page through the share transport, reads it back in place and compares.
 * cc -std=c11 -D_GNU_SOURCE -Wall -Wextra -I../include client.c -o client && ./client /run/weir/share.sock
 */
#include <stdio.h>

#include "weir_share.h"

static int fail(const char *what, int error)
{
	fprintf(stderr, "client: %s: %s\n", what, strerror(-error));
	return 1;
}

int main(int count, char **arguments)
{
	struct weir_share share;
	struct weir_lease lease;
	uint64_t page;
	int error;

	uint32_t flags = 0;
	const char *volume = "";

	if (count < 2 || count > 4) {
		fprintf(stderr, "usage: client SOCKET [VOLUME [in-place]]\n");
		return 2;
	}
	if (count > 2)
		volume = arguments[2];
	if (count > 3 && strcmp(arguments[3], "in-place") == 0)
		flags = WEIR_SHARE_IN_PLACE;
	error = weir_share_connect_to(&share, arguments[1], volume, 64, 64, flags);
	if (error != 0)
		return fail(arguments[1], error);
	for (page = 0; page < 1000 && error == 0; page++) {
		error = weir_share_reserve(&share, &lease);
		if (error != 0)
			break;
		memset(weir_share_frame(&share, &lease), (int)(page % 251), WEIR_SHARE_PAGE);
		memcpy(weir_share_frame(&share, &lease), &page, sizeof(page));
		error = weir_share_write(&share, page % share.pages, &lease);
		if (error == 0)
			error = weir_share_give(&share, &lease);
		if (error == 0)
			error = weir_share_read(&share, page % share.pages, &lease);
		if (error == 0 && memcmp(weir_share_page(&share, &lease), &page, sizeof(page)) != 0)
			error = -EBADMSG;
		if (error == 0)
			error = weir_share_give(&share, &lease);
	}
	weir_share_close(&share);
	if (error != 0)
		return fail("page", error);
	printf("1000 pages written and read in place\n");
	return 0;
}
