package ingress

import (
	"encoding/json"
	"fmt"
	"net/netip"
)

// pac is the proxy auto-configuration that sends hosts to the proxy and all
// else its own way.
func pac(hosts []string, proxy netip.AddrPort) []byte {
	known := make(map[string]bool, len(hosts))
	for _, host := range hosts {
		known[fold(host)] = true
	}
	list, _ := json.Marshal(known) // a map of booleans can't fail; JSON from Go is a JavaScript literal too
	return fmt.Appendf(nil, `// vz: these names go by the Environment's proxy, all else its own way.
var hosts = %s;
function FindProxyForURL(url, host) {
  host = host.toLowerCase().replace(/\.$/, "");
  return Object.prototype.hasOwnProperty.call(hosts, host) ? "PROXY %s" : "DIRECT";
}
`, list, proxy)
}
