package namespace

// masked names the places below the overlays that hold, or commonly hold,
// credentials or the host's identity. They are absent inside, whether or not
// their permissions would have kept guest root out. The last element may be a
// pattern of path.Match.
var masked = []string{
	// accounts
	"/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-",
	"/etc/security/opasswd", "/etc/sudoers", "/etc/sudoers.d", "/etc/polkit-1",
	"/etc/.pwd.lock", "/etc/krb5.keytab", "/etc/sssd", "/etc/pam_ldap.conf",
	"/etc/libnss-ldap.secret", "/etc/ldap.secret", "/etc/pam_ldap.secret",
	// keys
	"/etc/ssh/ssh_host_*", "/etc/ssl/private", "/etc/pki/tls/private",
	"/etc/letsencrypt", "/etc/ipsec.secrets", "/etc/ipsec.d/private",
	"/etc/swanctl", "/etc/wireguard", "/etc/openvpn", "/etc/strongswan.d",
	"/etc/secureboot", "/etc/luks-keys", "/etc/cryptsetup-keys.d",
	"/etc/credstore", "/etc/credstore.encrypted", "/usr/lib/credstore",
	"/etc/age", "/etc/sops", "/etc/vault.d", "/etc/consul.d", "/etc/nomad.d",
	// networks the host joined
	"/etc/NetworkManager/system-connections", "/etc/wpa_supplicant",
	"/etc/iwd", "/etc/ppp", "/etc/chatscripts", "/etc/netplan",
	"/etc/systemd/network", "/etc/tinc", "/etc/zerotier-one", "/etc/tailscale",
	// mounts and backups, whose options hold passwords
	"/etc/fstab", "/etc/crypttab", "/etc/auto.*", "/etc/samba",
	"/etc/cifs-credentials", "/etc/borgmatic", "/etc/restic",
	// services
	"/etc/kubernetes", "/etc/rancher", "/etc/docker", "/etc/mysql/debian.cnf",
	"/etc/rabbitmq", "/etc/exim4/passwd.client", "/etc/postfix/sasl*",
	"/etc/dovecot", "/etc/msmtprc", "/etc/nullmailer", "/etc/boto.cfg",
	"/etc/waagent.conf", "/etc/cloud", "/etc/gitlab", "/etc/gitlab-runner",
	"/etc/grafana", "/etc/puppet", "/etc/puppetlabs", "/etc/salt", "/etc/chef",
	"/etc/apt/auth.conf", "/etc/apt/auth.conf.d", "/etc/snmp",
	"/etc/netrc", "/etc/npmrc", "/etc/pip.conf",
	// what the host does by itself
	"/etc/cron*", "/etc/anacrontab", "/etc/systemd/system",
	// identity: the Machine gets its own
	"/etc/hostid",
}

// toolState lists the directories under /var that the host's tools read to
// work. Nothing else of /var is shown: logs, mail, spools, databases and caches
// are the host's state.
var toolState = []string{
	"/var/lib/dpkg", "/var/lib/ucf", "/var/lib/rpm", "/var/lib/alternatives",
	"/var/lib/pacman", "/var/lib/gems", "/var/lib/ghc", "/var/lib/python",
	"/var/lib/texmf", "/var/lib/xml-core", "/var/lib/sgml-base",
	"/var/lib/aspell", "/var/lib/dictionaries-common",
	"/var/lib/ca-certificates-java", "/var/cache/fontconfig",
}

// tools are the host's top directories that a Machine sees through overlays.
// One that is a link on the host (merged /usr) becomes the same link.
var tools = []string{
	"/usr", "/etc", "/opt", "/nix", "/gnu",
	"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
}

// owned says how many levels of a host directory guest root gets as its own,
// so that it can make and replace files in them. A directory that the host's
// root owns is read-only for guest root otherwise.
var owned = map[string]int{
	"/etc":       16, // all of it
	"/usr":       0,  // itself only
	"/usr/local": 3,  // down to lib/python3.x/dist-packages
	"/opt":       0,
}

// ownFiles: every regular file that lies directly in one of these is copied
// when the Machine is first made, so that editing in place works too.
var ownFiles = map[string]bool{"/etc": true}
