// SPDX-License-Identifier: GPL-2.0
/*
 * Two Ethernet devices joined back to back, with all that devmem TCP asks of a NIC: page pools for
 * each queue that a memory provider may back, queue restart, header split, flow steering.
 *
 * Its DMA engine is memcpy to the bus address. Without an IOMMU that is the physical address, so
 * it reaches dma-bufs of system memory (udmabuf) and no others. For tests, on Linux 7.3.
 */
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/rtnetlink.h>
#include <linux/tcp.h>
#include <net/ipv6.h>
#include <net/netdev_lock.h>
#include <net/netdev_queues.h>
#include <net/netdev_rx_queue.h>
#include <net/page_pool/helpers.h>

#define DEVICES	2
#define QUEUES	4
/* Entries of the table that spreads flows over queues. */
#define INDIR	64
/* Flows with a queue of their own. */
#define RULES	16
/* Packets that may wait at a queue. */
#define BACKLOG	4096

struct fnic_rule {
	bool used;
	struct ethtool_rx_flow_spec fs;
};

struct fnic_rxq {
	struct napi_struct napi;
	struct sk_buff_head waiting;
	struct page_pool *pp;
	struct net_device *dev;
	u32 page_size;
	int idx;
	u64 placed, dropped;
};

struct fnic {
	struct fnic_rxq rxq[QUEUES];
	struct net_device *peer;
	struct platform_device *pdev;
	u32 indir[INDIR];
	struct fnic_rule rules[RULES];
	u32 rx_pending, tx_pending;
};

struct fnic_qmem {
	struct page_pool *pp;
	u32 page_size;
};

static struct net_device *dev_of[DEVICES];
static struct platform_device *pdev_of[DEVICES];

static bool fnic_rule_matches(const struct ethtool_rx_flow_spec *fs, const struct sk_buff *skb)
{
	const struct tcphdr *th = tcp_hdr(skb);

	switch (fs->flow_type & ~FLOW_EXT) {
	case TCP_V4_FLOW: {
		const struct ethtool_tcpip4_spec *v = &fs->h_u.tcp_ip4_spec;
		const struct ethtool_tcpip4_spec *m = &fs->m_u.tcp_ip4_spec;

		return skb->protocol == htons(ETH_P_IP) &&
		       !((ip_hdr(skb)->saddr ^ v->ip4src) & m->ip4src) &&
		       !((ip_hdr(skb)->daddr ^ v->ip4dst) & m->ip4dst) &&
		       !((th->source ^ v->psrc) & m->psrc) &&
		       !((th->dest ^ v->pdst) & m->pdst);
	}
	case TCP_V6_FLOW: {
		const struct ethtool_tcpip6_spec *v = &fs->h_u.tcp_ip6_spec;
		const struct ethtool_tcpip6_spec *m = &fs->m_u.tcp_ip6_spec;
		const struct ipv6hdr *ip = ipv6_hdr(skb);

		return skb->protocol == htons(ETH_P_IPV6) &&
		       !ipv6_masked_addr_cmp(&ip->saddr, (void *)m->ip6src, (void *)v->ip6src) &&
		       !ipv6_masked_addr_cmp(&ip->daddr, (void *)m->ip6dst, (void *)v->ip6dst) &&
		       !((th->source ^ v->psrc) & m->psrc) &&
		       !((th->dest ^ v->pdst) & m->pdst);
	}
	}
	return false;
}

static bool fnic_is_tcp(const struct sk_buff *skb)
{
	if (skb->protocol == htons(ETH_P_IP))
		return ip_hdr(skb)->protocol == IPPROTO_TCP;
	return skb->protocol == htons(ETH_P_IPV6) && ipv6_hdr(skb)->nexthdr == IPPROTO_TCP;
}

static int fnic_pick_rxq(struct net_device *dev, struct sk_buff *skb)
{
	struct fnic *nic = netdev_priv(dev);
	u32 q, i;

	if (fnic_is_tcp(skb))
		for (i = 0; i < RULES; i++)
			if (READ_ONCE(nic->rules[i].used) && fnic_rule_matches(&nic->rules[i].fs, skb)) {
				q = nic->rules[i].fs.ring_cookie;
				goto out;
			}
	q = READ_ONCE(nic->indir[skb_get_hash(skb) % INDIR]);
out:
	return q < dev->real_num_rx_queues ? q : 0;
}

static void *fnic_at(dma_addr_t addr)
{
	return phys_to_virt(addr);
}

/* skb_copy_bits(), and for fragments that the kernel must not read. */
static int fnic_gather(const struct sk_buff *skb, int from, void *to, int len)
{
	int i, end, start = skb_headlen(skb);

	if (skb_frags_readable(skb))
		return skb_copy_bits(skb, from, to, len);
	if (from < start) {
		int n = min(len, start - from);

		memcpy(to, skb->data + from, n);
		from += n;
		to += n;
		len -= n;
	}
	for (i = 0; i < skb_shinfo(skb)->nr_frags && len; i++, start = end) {
		const skb_frag_t *frag = &skb_shinfo(skb)->frags[i];
		dma_addr_t at;
		int n;

		end = start + skb_frag_size(frag);
		if (from >= end)
			continue;
		n = min(len, end - from);
		at = netmem_get_dma_addr(skb_frag_netmem(frag)) + skb_frag_off(frag);
		memcpy(to, fnic_at(at + from - start), n);
		from += n;
		to += n;
		len -= n;
	}
	return len ? -EFAULT : 0;
}

/* The packet as a NIC delivers it: headers in kernel memory, payload in the pages of the pool. */
static struct sk_buff *fnic_split(struct fnic_rxq *rxq, struct sk_buff *skb)
{
	int head = skb_transport_offset(skb) + tcp_hdrlen(skb), at = head, i;
	struct sk_buff *split;
	void *to;

	split = napi_alloc_skb(&rxq->napi, head);
	if (!split)
		return NULL;
	skb_put_data(split, skb->data, head);
	for (i = 0; at < skb->len; i++) {
		int n = min_t(int, rxq->page_size, skb->len - at);
		netmem_ref netmem;

		if (i == MAX_SKB_FRAGS)
			goto drop;
		netmem = page_pool_alloc_netmems(rxq->pp, GFP_ATOMIC | __GFP_NOWARN);
		if (!netmem)
			goto drop;
		skb_add_rx_frag_netmem(split, i, netmem, 0, n, rxq->page_size);
		skb_mark_for_recycle(split);
		to = fnic_at(page_pool_get_dma_addr_netmem(netmem));
		if (fnic_gather(skb, at, to, n))
			goto drop;
		at += n;
	}
	rxq->placed += i;
	split->ip_summed = CHECKSUM_UNNECESSARY;
	if (skb_is_gso(skb)) {
		skb_shinfo(split)->gso_size = skb_shinfo(skb)->gso_size;
		skb_shinfo(split)->gso_segs = skb_shinfo(skb)->gso_segs;
		skb_shinfo(split)->gso_type = skb_shinfo(skb)->gso_type;
	}
	split->protocol = eth_type_trans(split, rxq->dev);
	return split;
drop:
	rxq->dropped++;
	kfree_skb(split);
	return NULL;
}

static int fnic_poll(struct napi_struct *napi, int budget)
{
	struct fnic_rxq *rxq = container_of(napi, struct fnic_rxq, napi);
	int done;

	for (done = 0; done < budget; done++) {
		struct sk_buff *skb = skb_dequeue(&rxq->waiting);

		if (!skb)
			break;
		dev_sw_netstats_rx_add(rxq->dev, skb->len);
		if (page_pool_is_unreadable(rxq->pp) && fnic_is_tcp(skb) &&
		    skb->len > skb_transport_offset(skb) + tcp_hdrlen(skb)) {
			struct sk_buff *split = fnic_split(rxq, skb);

			consume_skb(skb);
			skb = split;
			if (!skb)
				continue;
		} else {
			/* Sent from a dma-buf, to a queue without one. */
			if (!skb_frags_readable(skb)) {
				struct sk_buff *flat = napi_alloc_skb(napi, skb->len);

				if (flat && !fnic_gather(skb, 0, skb_put(flat, skb->len), skb->len)) {
					flat->ip_summed = CHECKSUM_UNNECESSARY;
					flat->protocol = eth_type_trans(flat, rxq->dev);
				}
				consume_skb(skb);
				skb = flat;
				if (!skb)
					continue;
			} else if (__dev_forward_skb(rxq->dev, skb)) {
				continue;
			}
		}
		skb_record_rx_queue(skb, rxq->idx);
		napi_gro_receive(napi, skb);
	}
	if (done < budget && napi_complete_done(napi, done) && !skb_queue_empty(&rxq->waiting))
		napi_schedule(napi);
	return done;
}

static netdev_tx_t fnic_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct fnic *nic = netdev_priv(dev), *to = netdev_priv(nic->peer);
	struct fnic_rxq *rxq;

	if (!netif_running(nic->peer))
		goto drop;
	rxq = &to->rxq[fnic_pick_rxq(nic->peer, skb)];
	if (skb_queue_len_lockless(&rxq->waiting) >= BACKLOG)
		goto drop;
	skb_tx_timestamp(skb);
	dev_sw_netstats_tx_add(dev, 1, skb->len);
	skb_queue_tail(&rxq->waiting, skb);
	napi_schedule(&rxq->napi);
	return NETDEV_TX_OK;
drop:
	kfree_skb(skb);
	dev_core_stats_tx_dropped_inc(dev);
	return NETDEV_TX_OK;
}

static struct page_pool *fnic_pool(struct net_device *dev, int idx, u32 page_size)
{
	struct fnic *nic = netdev_priv(dev);
	struct page_pool_params params = {
		.order = get_order(page_size),
		.pool_size = 256,
		.nid = NUMA_NO_NODE,
		.dev = &nic->pdev->dev,
		.napi = &nic->rxq[idx].napi,
		.dma_dir = DMA_FROM_DEVICE,
		.max_len = page_size,
		.netdev = dev,
		.queue_idx = idx,
		.flags = PP_FLAG_DMA_MAP | PP_FLAG_DMA_SYNC_DEV |
			 PP_FLAG_ALLOW_UNREADABLE_NETMEM,
	};

	return page_pool_create(&params);
}

static int fnic_queue_alloc(struct net_device *dev, struct netdev_queue_config *qcfg,
			    void *mem, int idx)
{
	struct fnic_qmem *q = mem;

	q->page_size = qcfg->rx_page_size ?: PAGE_SIZE;
	q->pp = fnic_pool(dev, idx, q->page_size);
	return PTR_ERR_OR_ZERO(q->pp);
}

static void fnic_queue_free(struct net_device *dev, void *mem)
{
	struct fnic_qmem *q = mem;

	if (!IS_ERR_OR_NULL(q->pp))
		page_pool_destroy(q->pp);
}

static int fnic_queue_start(struct net_device *dev, struct netdev_queue_config *qcfg,
			    void *mem, int idx)
{
	struct fnic *nic = netdev_priv(dev);
	struct fnic_rxq *rxq = &nic->rxq[idx];
	struct fnic_qmem *q = mem;

	rxq->pp = q->pp;
	rxq->page_size = q->page_size;
	napi_enable_locked(&rxq->napi);
	local_bh_disable();
	napi_schedule(&rxq->napi);
	local_bh_enable();
	return 0;
}

static int fnic_queue_stop(struct net_device *dev, void *mem, int idx)
{
	struct fnic *nic = netdev_priv(dev);
	struct fnic_rxq *rxq = &nic->rxq[idx];
	struct fnic_qmem *q = mem;

	napi_disable_locked(&rxq->napi);
	q->pp = rxq->pp;
	q->page_size = rxq->page_size;
	page_pool_disable_direct_recycling(q->pp);
	return 0;
}

static void fnic_default_qcfg(struct net_device *dev, struct netdev_queue_config *qcfg)
{
	qcfg->rx_page_size = PAGE_SIZE;
}

static const struct netdev_queue_mgmt_ops fnic_queue_ops = {
	.ndo_queue_mem_size	= sizeof(struct fnic_qmem),
	.ndo_queue_mem_alloc	= fnic_queue_alloc,
	.ndo_queue_mem_free	= fnic_queue_free,
	.ndo_queue_start	= fnic_queue_start,
	.ndo_queue_stop		= fnic_queue_stop,
	.ndo_default_qcfg	= fnic_default_qcfg,
	.supported_params	= QCFG_RX_PAGE_SIZE,
};

static void fnic_down(struct net_device *dev, int queues)
{
	struct fnic *nic = netdev_priv(dev);
	int i;

	for (i = 0; i < queues; i++) {
		netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, NULL);
		napi_disable_locked(&nic->rxq[i].napi);
		__netif_napi_del_locked(&nic->rxq[i].napi);
	}
	synchronize_net();
	for (i = 0; i < queues; i++) {
		skb_queue_purge(&nic->rxq[i].waiting);
		page_pool_destroy(nic->rxq[i].pp);
		nic->rxq[i].pp = NULL;
	}
}

static int fnic_open(struct net_device *dev)
{
	struct fnic *nic = netdev_priv(dev);
	int i;

	for (i = 0; i < QUEUES; i++) {
		struct fnic_rxq *rxq = &nic->rxq[i];
		struct netdev_queue_config qcfg;

		netdev_queue_config(dev, i, &qcfg);
		rxq->page_size = qcfg.rx_page_size ?: PAGE_SIZE;
		netif_napi_add_config_locked(dev, &rxq->napi, fnic_poll, i);
		rxq->pp = fnic_pool(dev, i, rxq->page_size);
		if (IS_ERR(rxq->pp)) {
			int err = PTR_ERR(rxq->pp);

			__netif_napi_del_locked(&rxq->napi);
			fnic_down(dev, i);
			return err;
		}
		napi_enable_locked(&rxq->napi);
		if (i < dev->real_num_rx_queues)
			netif_queue_set_napi(dev, i, NETDEV_QUEUE_TYPE_RX, &rxq->napi);
	}
	netif_tx_start_all_queues(dev);
	netif_carrier_on(dev);
	return 0;
}

static int fnic_stop(struct net_device *dev)
{
	netif_carrier_off(dev);
	netif_tx_disable(dev);
	fnic_down(dev, QUEUES);
	return 0;
}

static const struct net_device_ops fnic_ops = {
	.ndo_open		= fnic_open,
	.ndo_stop		= fnic_stop,
	.ndo_start_xmit		= fnic_xmit,
	.ndo_validate_addr	= eth_validate_addr,
	.ndo_set_mac_address	= eth_mac_addr,
};

static void fnic_get_ringparam(struct net_device *dev, struct ethtool_ringparam *ring,
			       struct kernel_ethtool_ringparam *kernel_ring,
			       struct netlink_ext_ack *extack)
{
	struct fnic *nic = netdev_priv(dev);

	ring->rx_max_pending = 4096;
	ring->tx_max_pending = 4096;
	ring->rx_pending = nic->rx_pending;
	ring->tx_pending = nic->tx_pending;
	kernel_ring->hds_thresh_max = 1024;
	if (dev->cfg->hds_config == ETHTOOL_TCP_DATA_SPLIT_UNKNOWN)
		kernel_ring->tcp_data_split = ETHTOOL_TCP_DATA_SPLIT_DISABLED;
}

static int fnic_set_ringparam(struct net_device *dev, struct ethtool_ringparam *ring,
			      struct kernel_ethtool_ringparam *kernel_ring,
			      struct netlink_ext_ack *extack)
{
	struct fnic *nic = netdev_priv(dev);

	nic->rx_pending = ring->rx_pending;
	nic->tx_pending = ring->tx_pending;
	return 0;
}

static void fnic_get_channels(struct net_device *dev, struct ethtool_channels *ch)
{
	ch->max_combined = QUEUES;
	ch->combined_count = dev->real_num_rx_queues;
}

static int fnic_set_channels(struct net_device *dev, struct ethtool_channels *ch)
{
	return netif_set_real_num_queues(dev, ch->combined_count, ch->combined_count);
}

static u32 fnic_get_rx_ring_count(struct net_device *dev)
{
	return dev->real_num_rx_queues;
}

static u32 fnic_get_rxfh_indir_size(struct net_device *dev)
{
	return INDIR;
}

static int fnic_get_rxfh(struct net_device *dev, struct ethtool_rxfh_param *rxfh)
{
	struct fnic *nic = netdev_priv(dev);

	rxfh->hfunc = ETH_RSS_HASH_TOP;
	if (rxfh->indir)
		memcpy(rxfh->indir, nic->indir, sizeof(nic->indir));
	return 0;
}

static int fnic_set_rxfh(struct net_device *dev, struct ethtool_rxfh_param *rxfh,
			 struct netlink_ext_ack *extack)
{
	struct fnic *nic = netdev_priv(dev);

	if (rxfh->indir)
		memcpy(nic->indir, rxfh->indir, sizeof(nic->indir));
	return 0;
}

static int fnic_get_rxnfc(struct net_device *dev, struct ethtool_rxnfc *cmd, u32 *locs)
{
	struct fnic *nic = netdev_priv(dev);
	u32 i, n = 0;

	switch (cmd->cmd) {
	case ETHTOOL_GRXCLSRLCNT:
		for (i = 0; i < RULES; i++)
			n += nic->rules[i].used;
		cmd->rule_cnt = n;
		cmd->data = RULES | RX_CLS_LOC_SPECIAL;
		return 0;
	case ETHTOOL_GRXCLSRULE:
		if (cmd->fs.location >= RULES || !nic->rules[cmd->fs.location].used)
			return -ENOENT;
		cmd->fs = nic->rules[cmd->fs.location].fs;
		return 0;
	case ETHTOOL_GRXCLSRLALL:
		for (i = 0; i < RULES; i++)
			if (nic->rules[i].used) {
				if (n == cmd->rule_cnt)
					return -EMSGSIZE;
				locs[n++] = i;
			}
		cmd->rule_cnt = n;
		cmd->data = RULES;
		return 0;
	}
	return -EOPNOTSUPP;
}

static int fnic_set_rxnfc(struct net_device *dev, struct ethtool_rxnfc *cmd)
{
	struct fnic *nic = netdev_priv(dev);
	u32 type = cmd->fs.flow_type & ~FLOW_EXT, at = cmd->fs.location;

	switch (cmd->cmd) {
	case ETHTOOL_SRXCLSRLINS:
		if (type != TCP_V4_FLOW && type != TCP_V6_FLOW)
			return -EOPNOTSUPP;
		if (cmd->fs.ring_cookie >= QUEUES)
			return -EINVAL;
		if (at & RX_CLS_LOC_SPECIAL)
			for (at = 0; at < RULES && nic->rules[at].used; at++)
				;
		if (at >= RULES)
			return -ENOSPC;
		nic->rules[at].fs = cmd->fs;
		nic->rules[at].fs.location = at;
		cmd->fs.location = at;
		WRITE_ONCE(nic->rules[at].used, true);
		return 0;
	case ETHTOOL_SRXCLSRLDEL:
		if (at >= RULES || !nic->rules[at].used)
			return -ENOENT;
		WRITE_ONCE(nic->rules[at].used, false);
		return 0;
	}
	return -EOPNOTSUPP;
}

static const struct ethtool_ops fnic_ethtool_ops = {
	.supported_ring_params	= ETHTOOL_RING_USE_TCP_DATA_SPLIT |
				  ETHTOOL_RING_USE_HDS_THRS,
	.op_needs_rtnl		= ETHTOOL_OP_NEEDS_RTNL_SCHANNELS,
	.get_link		= ethtool_op_get_link,
	.get_ringparam		= fnic_get_ringparam,
	.set_ringparam		= fnic_set_ringparam,
	.get_channels		= fnic_get_channels,
	.set_channels		= fnic_set_channels,
	.get_rx_ring_count	= fnic_get_rx_ring_count,
	.get_rxfh_indir_size	= fnic_get_rxfh_indir_size,
	.get_rxfh		= fnic_get_rxfh,
	.set_rxfh		= fnic_set_rxfh,
	.get_rxnfc		= fnic_get_rxnfc,
	.set_rxnfc		= fnic_set_rxnfc,
};

static void fnic_destroy(int i)
{
	if (dev_of[i]) {
		unregister_netdev(dev_of[i]);
		free_netdev(dev_of[i]);
	}
	if (!IS_ERR_OR_NULL(pdev_of[i]))
		platform_device_unregister(pdev_of[i]);
}

static int fnic_create(int i)
{
	struct net_device *dev;
	struct fnic *nic;
	int err, q;

	pdev_of[i] = platform_device_register_simple("fnic", i, NULL, 0);
	if (IS_ERR(pdev_of[i]))
		return PTR_ERR(pdev_of[i]);
	err = dma_coerce_mask_and_coherent(&pdev_of[i]->dev, DMA_BIT_MASK(64));
	if (err)
		return err;
	dev = alloc_etherdev_mqs(sizeof(*nic), QUEUES, QUEUES);
	if (!dev)
		return -ENOMEM;
	SET_NETDEV_DEV(dev, &pdev_of[i]->dev);
	nic = netdev_priv(dev);
	nic->pdev = pdev_of[i];
	nic->rx_pending = 256;
	nic->tx_pending = 256;
	for (q = 0; q < INDIR; q++)
		nic->indir[q] = q % QUEUES;
	for (q = 0; q < QUEUES; q++) {
		nic->rxq[q].dev = dev;
		nic->rxq[q].idx = q;
		skb_queue_head_init(&nic->rxq[q].waiting);
	}
	strscpy(dev->name, "fnic%d");
	eth_hw_addr_random(dev);
	dev->netdev_ops = &fnic_ops;
	dev->ethtool_ops = &fnic_ethtool_ops;
	dev->queue_mgmt_ops = &fnic_queue_ops;
	dev->pcpu_stat_type = NETDEV_PCPU_STAT_TSTATS;
	dev->max_mtu = ETH_MAX_MTU;
	dev->netmem_tx = NETMEM_TX_DMA;
	dev->hw_features = NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_RXCSUM | NETIF_F_TSO |
			   NETIF_F_TSO6 | NETIF_F_HIGHDMA | NETIF_F_NTUPLE | NETIF_F_GRO;
	dev->features |= dev->hw_features;
	netif_carrier_off(dev);
	dev_of[i] = dev;
	return 0;
}

static int __init fnic_init(void)
{
	int i, err = 0;

	for (i = 0; i < DEVICES && !err; i++)
		err = fnic_create(i);
	if (!err) {
		((struct fnic *)netdev_priv(dev_of[0]))->peer = dev_of[1];
		((struct fnic *)netdev_priv(dev_of[1]))->peer = dev_of[0];
	}
	for (i = 0; i < DEVICES && !err; i++) {
		err = register_netdev(dev_of[i]);
		if (err) {
			while (i < DEVICES) {
				free_netdev(dev_of[i]);
				dev_of[i++] = NULL;
			}
		}
	}
	if (err)
		for (i = 0; i < DEVICES; i++)
			fnic_destroy(i);
	return err;
}

static void __exit fnic_exit(void)
{
	int i;

	rtnl_lock();
	/* Both are down before either goes, because each sends into the other. */
	for (i = 0; i < DEVICES; i++)
		dev_close(dev_of[i]);
	rtnl_unlock();
	for (i = 0; i < DEVICES; i++)
		fnic_destroy(i);
}

module_init(fnic_init);
module_exit(fnic_exit);
MODULE_DESCRIPTION("A pair of emulated NICs with devmem TCP");
MODULE_LICENSE("GPL");
