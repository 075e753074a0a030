// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Asks nvidia-uvm.ko for the self-test of its nv_kthread_q: uvm-selftest DEVICE
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include "uvm_linux_ioctl.h"
#include "uvm_test_ioctl.h"

int main(int argc, char **argv)
{
	UVM_INITIALIZE_PARAMS begin = { 0 };
	UVM_TEST_NV_KTHREAD_Q_PARAMS test = { .rmStatus = ~0u };
	int fd = argc == 2 ? open(argv[1], O_RDWR) : -1;

	if (fd < 0 || ioctl(fd, UVM_INITIALIZE, &begin)) {
		fprintf(stderr, "uvm-selftest: %s\n", strerror(errno));
		return 2;
	}
	if (begin.rmStatus) {
		fprintf(stderr, "uvm-selftest: UVM_INITIALIZE says %#x\n", begin.rmStatus);
		return 2;
	}
	if (ioctl(fd, UVM_TEST_NV_KTHREAD_Q, &test)) {
		fprintf(stderr, "uvm-selftest: %s\n", strerror(errno));
		return 2;
	}
	printf("nv_kthread_q self-test of nvidia-uvm: status %#x\n", test.rmStatus);
	return test.rmStatus != 0;
}
