/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The driver's build makes one; its queue needs nothing of it. */
